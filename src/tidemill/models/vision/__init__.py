"""Models that look at images: how an image becomes tiles and tokens (`views`, which need no torch), and how tiles
become features in the places of tokens (`eyes`)."""
