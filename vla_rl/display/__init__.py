"""How figures are shown: charts, words and tables."""
