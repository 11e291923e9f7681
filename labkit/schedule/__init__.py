"""schedule: pipeline schedules as plain lists: made, checked, timed and written as text; plain Python, no torch.

Left out: running them on ranks (`labkit.model.pipeline`), which takes torch.
"""
