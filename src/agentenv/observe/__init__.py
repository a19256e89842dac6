"""What can be seen of a node: figures, logs and events of its sandboxes, metrics of the whole."""
