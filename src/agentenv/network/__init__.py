"""Slots: one network namespace per sandbox, its rules and its name resolution."""
