"""``pichak fleet report``: one stored run as a self-contained HTML page."""
