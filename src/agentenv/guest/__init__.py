"""What runs inside the virtual machine. Standard library only; imports nothing of the rest."""
