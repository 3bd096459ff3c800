"""What Multiscreen is compared with. support/models.py builds these models by name."""
