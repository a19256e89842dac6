"""The server that runs code for E2B's code interpreter clients, on port 49999 of a guest.

It runs inside a sandbox (template `code-interpreter-v1`) with packages of its own, which `requirements.txt`
lists, and imports nothing of the rest of this project. Each context is a Jupyter kernel, started here:
there is no Jupyter server.
"""
