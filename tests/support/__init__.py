"""What several folders of tests share: waiting, processes, engines."""
