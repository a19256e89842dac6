"""AgentENV in Python: microVM sandboxes for agentic reinforcement learning."""

__version__ = "0.1.0"
