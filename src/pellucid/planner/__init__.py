"""What a model costs on a device: memory, step times, ceilings. Arithmetic only: no torch, no numpy, no measurement.

`shape.py` counts parameters, FLOPs and bytes; `hardware.py` knows devices; `roofline.py` turns both into seconds of a
step; `memory.py` into how many sequences fit; `ceilings.py` into what a whole trace must cost.
"""
