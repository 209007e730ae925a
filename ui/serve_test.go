package ui_test

import "testing"

func TestServe(t *testing.T) {
	w := newWorld(t)
	t.Log(w.url)
	select {}
}
