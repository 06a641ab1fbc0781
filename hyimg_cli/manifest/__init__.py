"""Jobs on disk: read a manifest, settle its defaults, order and count it, record outcomes."""
