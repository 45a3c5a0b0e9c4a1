"""What is recorded, and how it is kept and drawn again."""
