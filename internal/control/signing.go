package control

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
)

// SigningKey is the key that signs certificates. It is made when it is first asked
// for, and is the same for every process of the installation.
func (s *Store) SigningKey(ctx context.Context) (ed25519.PrivateKey, error) {
	fresh := make([]byte, ed25519.SeedSize)
	if _, err := rand.Read(fresh); err != nil {
		return nil, err
	}
	if _, err := s.pool.Exec(ctx, `INSERT INTO backfill_control.signing_key (seed) VALUES ($1) ON CONFLICT DO NOTHING`, fresh); err != nil {
		return nil, err
	}
	var seed []byte
	if err := s.pool.QueryRow(ctx, `SELECT seed FROM backfill_control.signing_key`).Scan(&seed); err != nil {
		return nil, err
	}
	return ed25519.NewKeyFromSeed(seed), nil
}
