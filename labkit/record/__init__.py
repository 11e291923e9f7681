"""record: what a rank did: every op, collective, wait and byte held, as frozen data without tensors.

Left out: pictures and checks of a record, which live in rooms above.
"""
