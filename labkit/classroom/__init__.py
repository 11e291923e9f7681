"""classroom: build the notebook editions from their sources, and prove that the checks tell right from wrong.

Left out for now: grading folders of submissions, and the sandbox that it needs.
"""
