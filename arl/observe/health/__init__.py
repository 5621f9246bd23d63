"""Rules that find what looks wrong in a run: `digest` reads its steps, `rules` are sentences about them with advice."""
