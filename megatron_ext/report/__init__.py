"""What a training run leaves behind: metrics, events, options, a report page, a progress line."""
