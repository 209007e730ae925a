package pace

import "time"

// Tide remembers when a position that only grows was first seen to have reached
// its heights, so that a position read elsewhere can be told in time: how long ago
// was the source there? It keeps a bounded number of marks, thinner the older they are.
type Tide struct {
	marks []mark
}

type mark struct {
	position int64
	at       time.Time
}

// maxMarks bounds the memory of a Tide.
const maxMarks = 1024

// Mark records where the position is at a time. A position that falls begins anew.
func (t *Tide) Mark(position int64, at time.Time) {
	if n := len(t.marks); n > 0 {
		switch last := t.marks[n-1].position; {
		case position == last:
			return
		case position < last:
			t.marks = nil
		}
	}
	t.marks = append(t.marks, mark{position, at})
	if len(t.marks) > maxMarks {
		// Of the older half every second mark goes.
		half := len(t.marks) / 2
		kept := t.marks[:0]
		for i, m := range t.marks {
			if i >= half || i%2 == 0 {
				kept = append(kept, m)
			}
		}
		t.marks = kept
	}
}

// Behind is for how long at least there has been more than position: since when
// the first mark above it was made. It is 0 when nothing above it was seen.
func (t *Tide) Behind(position int64, now time.Time) time.Duration {
	for _, m := range t.marks {
		if m.position > position {
			return max(now.Sub(m.at), 0)
		}
	}
	return 0
}
