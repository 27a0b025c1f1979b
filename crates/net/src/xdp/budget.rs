//! When references are not worth it: errors of so many frames, and the rest of a window is copied.

/// Frames of a window.
const WINDOW: u32 = 1024;
/// One in so many may fail.
const SHARE: u32 = 64;

/// What happened in this window.
#[derive(Debug, Default)]
pub(super) struct Budget {
    frames: u32,
    errors: u32,
}

impl Budget {
    /// A frame goes. True at the end of a window.
    pub(super) fn frame(&mut self) -> bool {
        self.frames += 1;
        let over = self.frames >= WINDOW;
        if over {
            *self = Self::default();
        }
        over
    }

    /// The device did not take something.
    pub(super) fn error(&mut self) {
        self.errors += 1;
    }

    /// Whether there were too many errors.
    pub(super) fn is_spent(&self) -> bool {
        self.errors > self.frames / SHARE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_forgets() {
        let mut budget = Budget::default();
        (0..128).for_each(|_| assert!(!budget.frame()));
        budget.error();
        budget.error();
        assert!(!budget.is_spent());
        budget.error();
        assert!(budget.is_spent());
        let over: Vec<bool> = (128..WINDOW).map(|_| budget.frame()).collect();
        assert_eq!(over.iter().filter(|over| **over).count(), 1);
        assert!(over.last() == Some(&true) && !budget.is_spent());
    }
}
