"""Integrations with other libraries, one module per library; each needs the extra of its name."""
