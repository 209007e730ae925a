//go:build !linux

package testkit

func inMemory() string { return "" }
