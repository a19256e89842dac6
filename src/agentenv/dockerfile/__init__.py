"""Dockerfiles and their context, on the client's side: a file becomes steps for a node's build API."""
