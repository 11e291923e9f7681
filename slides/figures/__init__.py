"""The figures of the decks: a module a lab, in it a public function a figure, each without arguments.

Every figure is drawn by `labkit.view` from data that is computed: by the cost model, by a replay, or by a recorded run
on real ranks. Nothing that a clock measures is drawn, so a deck does not depend on how fast or busy a machine is. The
losses of lab 02 depend on the text that is trained on, which is that of the Python at hand.
"""
