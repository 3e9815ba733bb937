"""The run page: one static HTML file in the run's folder, made from the run's files, written while it goes on."""
