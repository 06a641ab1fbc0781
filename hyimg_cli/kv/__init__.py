"""Keys and values of one sequence: where they live while prefill, decode and denoise steps use
them.
"""
