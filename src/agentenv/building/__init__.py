"""Builds of templates: what is asked for, the steps in a machine, what is kept of them, and what is told."""
