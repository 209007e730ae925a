//go:build race

package acceptance

func init() { raceEnabled = true }
