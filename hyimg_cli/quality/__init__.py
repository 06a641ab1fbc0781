"""How far two pictures are apart: arrays in, numbers out. Models and files are no matter here."""
