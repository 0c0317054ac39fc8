// Addresses of this process and the pages behind them.
#pragma once

#include <cstddef>

// Bytes of a page; addresses and sizes below are multiples of it.
size_t lctx_page_size();

// Reserve addresses; nullptr when the system refuses. usable: they are zeros, which take memory when they are first
// written to (Windows counts all of them against RAM and page file at once); else none can be read or written.
char * lctx_pages_reserve(size_t size, bool usable);

// End all that was reserved there, of the same size.
void lctx_pages_end(char * at, size_t size);

// Let pages be read and written, or not. False when the system has no room for them. What was in pages that cannot be
// used may be lost.
bool lctx_pages_use(char * at, size_t size, bool usable);

// Let the system take the memory of usable pages: nothing may be read there before it is written again.
void lctx_pages_discard(char * at, size_t size);

// Ask for huge pages here, or for none. Linux only; elsewhere, and where the system has none, this does nothing.
void lctx_pages_prefer_huge(char * at, size_t size, bool huge);

// Bytes of the largest cache of the first CPU; 0 when the system does not say.
size_t lctx_largest_cache();
