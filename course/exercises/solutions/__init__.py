"""Solutions of parts 3 and 4, for teachers. Those of parts 1 and 2 are multiscreen.py."""
