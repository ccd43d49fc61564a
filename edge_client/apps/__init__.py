"""Programs beside the service: predictions over HTTP and of a camera's folder, Home Assistant, drift, and review.

Apps use the state and the installed head, and upload nothing. In this package only the commands in `cli` import them.
"""
