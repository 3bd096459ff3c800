"""Tests of what stands around the model; test_multiscreen.py has the proof."""
