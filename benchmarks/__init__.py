"""How fast the recipe and its engines are, against what they could be: `make bench`.

goals.toml has the rows whose sides take turns (by_turns.py measures them); input_pipeline,
wire_format, start_time and memory are rows of their own kind. programs/ is what they start.
gpu_check.py is `make gpu-check`: what five minutes on a GPU can show.
"""
