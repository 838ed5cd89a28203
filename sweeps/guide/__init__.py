"""What the guided searcher is made of: beliefs about configurations, and what a trial is worth."""
