"""doctor: what a machine has, and what each missing thing costs the learner. It never imports torch.

Left out: repairs. The doctor says what to do and touches nothing.
"""
