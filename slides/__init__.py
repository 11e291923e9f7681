"""slides: one deck a lab, in Markdown, with figures and numbers that are computed when the decks are built.

`make slides` runs `slides.tools`, then `slides.build`. Left out: anything that labkit itself needs.
"""
