"""Tests of the house itself: rooms, style, packaging, the set-up, and the papers at the door."""
