"""The certificate that the node serves: a given one, or of an authority of its own; and its port for TLS."""
