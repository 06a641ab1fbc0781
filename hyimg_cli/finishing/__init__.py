"""Put a redraw back on its source, which stays equal outside the edit.

    source ─ fitted ─▶ reference ─┐
                                  ├─ registration ─ colour ─ region ─▶ verdict ─▶ composite
    what the model drew ──────────┘

Pure functions over arrays: no files, no model, no torch.
"""
