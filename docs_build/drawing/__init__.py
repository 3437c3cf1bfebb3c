"""Pictures as SVG: timelines, plots, and the drawings of the learning pages."""
