CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, total numeric(12, 2) NOT NULL, placed_at timestamptz NOT NULL);
INSERT INTO orders SELECT i, 'customer ' || i % 997, i % 10000 / 100.0, now() - i * interval '1 minute' FROM generate_series(1, 10000) i;
