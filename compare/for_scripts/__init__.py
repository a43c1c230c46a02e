"""The folder that is put on the PYTHONPATH of scripts: whatever else were here, they could import
it instead of their own. Its file is imported by scripts in any environment, and by compare/."""
