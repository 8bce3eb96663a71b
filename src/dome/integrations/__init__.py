"""The filter in other people's trainers: Lightning, Transformers, Accelerate.

Each file needs the library it is named after and is imported by its own name.
"""
