"""The program that runs jobs: it builds submissions and installs heads in a process of its own."""
