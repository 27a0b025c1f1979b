//! Limit of errors in a window of frames, above which the rest of the window is copied instead of referenced.

/// Frames of a window.
const WINDOW: u32 = 1024;
/// Frames per permitted error.
const FRAMES_PER_ERROR: u32 = 64;

/// Frames and errors of the current window.
#[derive(Debug, Default)]
pub(super) struct ErrorBudget {
    frames: u32,
    errors: u32,
}

impl ErrorBudget {
    /// Counts a frame. Returns true at the end of a window.
    pub(super) fn count_frame(&mut self) -> bool {
        self.frames += 1;
        let ends = self.frames >= WINDOW;
        if ends {
            *self = Self::default();
        }
        ends
    }

    /// Counts a send that the driver refused for lack of room or memory.
    pub(super) fn count_error(&mut self) {
        self.errors += 1;
    }

    /// Returns true if the window has too many errors.
    pub(super) fn is_exceeded(&self) -> bool {
        self.errors > self.frames / FRAMES_PER_ERROR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_limited_per_window() {
        let mut budget = ErrorBudget::default();
        (0..128).for_each(|_| assert!(!budget.count_frame()));
        budget.count_error();
        budget.count_error();
        assert!(!budget.is_exceeded());
        budget.count_error();
        assert!(budget.is_exceeded());
        let ends: Vec<bool> = (128..WINDOW).map(|_| budget.count_frame()).collect();
        assert_eq!(ends.iter().filter(|ends| **ends).count(), 1);
        assert!(ends.last() == Some(&true) && !budget.is_exceeded());
    }
}
