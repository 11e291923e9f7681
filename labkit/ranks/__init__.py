"""ranks: real rank processes started in a tenth of a second, and the ledger of what they issued.

Left out: a launcher for several machines. There, the same functions run under torchrun, deepspeed or Slurm.
"""
