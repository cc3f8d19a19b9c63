# What the address sanitizer cannot know by itself: which parts of a slab hold something. Nothing in a build without it.
cdef extern from *:
    """
    #if defined(__has_feature)
    #if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
    #define __SANITIZE_ADDRESS__ 1
    #endif
    #endif
    #ifdef __SANITIZE_ADDRESS__
    #include <sanitizer/asan_interface.h>
    #define kvpool_hide(start, end) \\
        __asan_poison_memory_region((void *)(start), (size_t)((char *)(end) - (char *)(start)))
    #define kvpool_show(start, end) \\
        __asan_unpoison_memory_region((void *)(start), (size_t)((char *)(end) - (char *)(start)))
    #else
    #define kvpool_hide(start, end) ((void)0)
    #define kvpool_show(start, end) ((void)0)
    #endif
    """
    # From here on every access between the two addresses is an error ...
    void hide "kvpool_hide"(const void *start, const void *end) noexcept nogil
    # ... and from here on none is.
    void show "kvpool_show"(const void *start, const void *end) noexcept nogil
