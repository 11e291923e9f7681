"""The labs: per exercise its judge, and the experiments that `labkit run` starts. No solution stands here.

A lab is a module `labNN` with a tuple EXERCISES. Left out: pictures, which the notebooks draw with
`labkit.view`.
"""
