CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, total numeric(12, 2) NOT NULL, placed_at timestamptz NOT NULL);
