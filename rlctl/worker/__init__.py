"""One rank: serialises admin work against its engine. Rank 0's lives in the stage server, followers' in their own."""
