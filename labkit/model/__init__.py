"""model: what is trained in the labs: one small Llama, real text in seeded batches, and how DeepSpeed is started.

Left out: trainers and configurations. The training loop is the lesson and stays in the notebook.
"""
