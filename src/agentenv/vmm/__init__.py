"""Virtual machines: the machine protocol and its hypervisors."""
