//go:build linux && race

package acceptance

func init() { raceEnabled = true }
